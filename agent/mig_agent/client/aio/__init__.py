"""The client for asyncio. Its requests, answers, errors and rules for repeating are those of the synchronous one."""
