"""A router and traffic that drive simulated pods through an indexer."""
