"""Anthropic's dialect, `/v1/messages`, translated to chat completions and back: same gate, same ledger.

Source: https://docs.anthropic.com/en/api/messages
"""
