"""The demo: a fresh drafter learns from live traffic, and is then measured on prompts that were never sent."""
