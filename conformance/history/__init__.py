"""What clients did to a store and when, and whether any order of it explains it."""
