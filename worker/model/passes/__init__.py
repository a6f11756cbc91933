"""Rewrites of an exported graph before its nodes get layers: constants, masks of attention, changes in place."""
