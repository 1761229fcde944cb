"""A simulated world in which effects happen once, thousands of schedules of it."""
