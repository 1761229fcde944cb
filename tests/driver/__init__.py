"""The driver kit: what a handle does in front of any store."""
