"""What a cell needs: the names that it reads, where they come from, and modules that travel as source."""
