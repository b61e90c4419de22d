"""Audits: attacks on the real code path, and what they prove."""
