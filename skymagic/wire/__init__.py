"""What processes say to each other: frozen messages of plain values, and the session that carries them over lost connections."""
