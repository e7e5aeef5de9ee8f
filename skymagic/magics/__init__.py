"""The magics: a line becomes a frozen request, one call is made, and the answer is shown."""
