"""Measurements that users run, each with its command of ``osd bench``."""
