"""The web page of the service: server-rendered, without JavaScript, for the person who approves or rejects."""
