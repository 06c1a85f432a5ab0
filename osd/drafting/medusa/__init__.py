"""Medusa: heads on the target's last hidden state; the module that trains, and the session that drafts."""
