"""Checks of this machine for ``osd doctor``."""
