"""Tokens and batches: video, images and text from files to masked, packed rows."""
