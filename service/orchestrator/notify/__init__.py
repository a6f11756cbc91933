"""Webhook notifications: claims deliveries from the store, signs and sends them. Reads no jobs."""
