"""Needle-in-a-haystack and question-answering evaluation, and its reports."""
