"""What the suite cannot know about Postgres."""
