"""The code in the documentation is run."""
