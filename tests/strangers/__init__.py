"""Other people's stores, put behind the contract as far as they go, and certified."""
