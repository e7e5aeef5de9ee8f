"""What the user sees: text and HTML as pure functions, and the notebook as a screen."""
