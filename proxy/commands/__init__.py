"""`tallygate …`: one module a subject. What a command needs it imports when it runs."""
