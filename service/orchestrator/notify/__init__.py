"""Webhook notifications: claims deliveries from the store, signs and sends them. Knows no jobs beyond their deliveries."""
