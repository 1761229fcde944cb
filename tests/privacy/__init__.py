"""Encryption: what is bound to what, keyrings, and what stays readable."""
