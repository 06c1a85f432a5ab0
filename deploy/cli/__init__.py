"""Commands of ``osd`` that start something on this machine."""
