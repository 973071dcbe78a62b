"""Forgot to say which contract it speaks."""
