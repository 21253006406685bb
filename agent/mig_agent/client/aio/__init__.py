"""The client for asyncio, with the requests, answers, errors and retry rules of the synchronous one."""
