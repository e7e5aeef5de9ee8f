"""One run on some ranks: sent, streamed, failed fast, interrupted, freed, reported."""
