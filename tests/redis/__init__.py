"""What the conformance suite cannot check of the Redis driver."""
