"""What several modules share; no module of its own."""
