"""Generated from proto/kivi/v1 by proto/generate.py; never edited."""
