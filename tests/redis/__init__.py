"""What the shared clauses cannot know of the Redis driver."""
