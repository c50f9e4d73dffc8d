"""Other people's notations, lowered to the language."""
