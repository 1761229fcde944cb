"""What the suite cannot know about SQLite."""
