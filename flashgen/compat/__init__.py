"""Other packages' functions under their own names and arguments, served by flashgen."""
