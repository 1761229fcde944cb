"""What the suite cannot know about the core."""
