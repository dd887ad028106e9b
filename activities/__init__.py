"""The shipped application's activities: its job handlers and what they are made of. Not part of the library's wheel."""
