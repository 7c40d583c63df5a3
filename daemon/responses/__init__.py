"""Stored responses of OpenAI's protocol."""
