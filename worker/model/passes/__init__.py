"""Rewrites of an exported graph before its nodes get layers: constants are folded, attention loses constant masks."""
