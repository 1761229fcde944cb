"""Real servers for the tests, started where they are needed and stopped at exit."""
