"""OpenAI's `/v1/responses`, translated to chat completions and back. Nothing is stored: every request is complete.

Source: https://platform.openai.com/docs/api-reference/responses
"""
