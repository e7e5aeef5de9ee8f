"""What both ends of a tunnel share: numbered frames, who greets whom, TCP streams in channels, and the loop that carries them."""
