"""Registers the automations of containers/monitoring/notifications.yml for a webhook or an e-mail address."""

import logging
from typing import Any
from urllib.parse import urlsplit

import yaml
from prefect.blocks.abstract import NotificationBlock
from prefect.blocks.notifications import CustomWebhookNotificationBlock, SlackWebhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.schemas.automations import AutomationCore

from flows.operation.api import connected
from tasks.errors import ConfigError, Problem
from tasks.home import Home
from tasks.toolchain.triton_installation import containers_folder

BLOCK = "enginehouse"
"""The name of the notification block."""


def register(home: Home, url: str) -> list[str]:
    """Send the automations' messages to `url` from now on, instead of where they went before; returns their names.

    Raises `ConfigError` for an address that nothing can be sent to, or where there is no server.
    """
    channel = channel_of(url)
    with connected(home) as client:
        block = str(channel.save(BLOCK, overwrite=True))
        names = []
        for wanted in automations(block):
            _forget(client, wanted["name"])
            client.create_automation(AutomationCore.model_validate(wanted))
            names.append(wanted["name"])
        return names


def remove(home: Home) -> list[str]:
    """Register them no more; returns the names of those that were there."""
    with connected(home) as client:
        return [wanted["name"] for wanted in automations(BLOCK) if _forget(client, wanted["name"])]


def automations(block: str) -> list[dict[str, Any]]:
    """The template's automations, with a block's id in its place."""
    text = (containers_folder() / "monitoring" / "notifications.yml").read_text()
    found: list[dict[str, Any]] = yaml.safe_load(text)["automations"]
    for automation in found:
        for action in automation["actions"]:
            action["block_document_id"] = block
    return found


def channel_of(url: str) -> NotificationBlock:
    """What sends to `url`: a webhook gets JSON; any other scheme is Apprise's, such as `mailtos://`."""
    if url.startswith(("http://", "https://")) and _names_host(url):
        message = {"subject": "{{subject}}", "body": "{{body}}"}
        return CustomWebhookNotificationBlock(name=BLOCK, url=url, method="POST", json_data=message)
    import apprise

    logging.getLogger("apprise").setLevel(logging.CRITICAL)  # ours names the mend, and hides passwords
    if url.startswith(("http://", "https://")) or not apprise.Apprise().add(url):
        scheme, colon, _ = url.partition(":")
        raise ConfigError(
            Problem(
                f"nothing can be sent to {scheme}{'://…' if colon else ''}",
                hint="https://… for a webhook, mailtos://user:password@smtp.example.com?to=ann@example.com for e-mail",
            )
        )
    # Of Prefect's blocks this one hands an address that is not Slack's on to Apprise, whatever its scheme.
    return SlackWebhook(url=url)


def _names_host(url: str) -> bool:
    try:
        return bool(urlsplit(url).hostname)
    except ValueError:  # such as a bracket that is not closed
        return False


def _forget(client: SyncPrefectClient, name: str) -> bool:
    found = client.read_automations_by_name(name)
    for automation in found:
        client.delete_automation(automation.id)
    return bool(found)
