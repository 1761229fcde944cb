"""The driver kit: what backend authors build a store with."""
