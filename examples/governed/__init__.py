"""A governed dispatch, refused and allowed."""
