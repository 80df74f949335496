"""Tokens per second, bytes and learning on truly slow links, side by side with torch, torchft and hivemind."""
