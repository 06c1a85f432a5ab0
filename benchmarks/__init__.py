"""What the library is measured by, and how to run it again: ``osd bench`` and ``osd analyze``."""
