"""`kvindexer experiment`: what routing by prefix and load gains on a recorded trace, through a real indexer."""
