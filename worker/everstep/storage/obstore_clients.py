"""obstore's clients, made from the settings and credentials that the fsspec backend of the same URL has found.

One way to say who one is, for both: fsspec's options and the environment. Each client asks for the credentials again
when they expire. Google's is left out: obstore's client for it looks for an instance's own credentials even when it is
given others, so that it cannot be held to the contract without a cloud.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import fsspec.asyn

from everstep.storage.azure import AzureStore
from everstep.storage.errors import StoreUnusable
from everstep.storage.fsspec_store import FsspecStore
from everstep.storage.s3 import S3Store

_CLIENT: Final = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=120)}
_ONCE: Any = {"max_retries": 0}
_KEEP: Final = timedelta(minutes=5)  # how long one reading of the credentials is used


def connect(store: FsspecStore) -> Any:
    """An obstore client whose names are the store's. Raises `StoreUnusable` for credentials that it cannot carry."""
    match store:
        case S3Store():
            return _s3(store)
        case AzureStore():
            return _azure(store)
        case _:
            raise StoreUnusable(f"{store.url}: obstore serves s3 and az only")


def _s3(store: S3Store) -> Any:
    from obstore.store import S3Store as Client  # noqa: PLC0415  an extra

    fs, _ = store.fs()
    meta = fs.s3.meta
    bucket, prefix = store.at("")
    settings: dict[str, Any] = {"endpoint": meta.endpoint_url, "region": meta.region_name or "us-east-1"}
    if fs.anon:
        settings["skip_signature"] = True
    else:
        settings["credential_provider"] = lambda: _s3_credentials(fs)
    # Over TLS nothing is gained by hashing each body a second time.
    settings["unsigned_payload"] = True
    return Client(
        bucket, prefix=prefix.rstrip("/"), client_options=_options(meta.endpoint_url), retry_config=_ONCE, **settings
    )


def _s3_credentials(fs: Any) -> Any:
    if fs.key and fs.secret:
        return {"access_key_id": fs.key, "secret_access_key": fs.secret, "token": fs.token, "expires_at": None}
    found = fsspec.asyn.sync(fs.loop, _frozen, fs)
    return {
        "access_key_id": found.access_key,
        "secret_access_key": found.secret_key,
        "token": found.token,
        "expires_at": _soon(),
    }


async def _frozen(fs: Any) -> Any:
    return await (await fs.session.get_credentials()).get_frozen_credentials()


def _azure(store: AzureStore) -> Any:
    from obstore.store import AzureStore as Client  # noqa: PLC0415

    fs, _ = store.fs()
    container, prefix = store.at("")
    service = fs.service_client
    settings: dict[str, Any] = {"account_name": service.account_name, "endpoint": service.url.split("?")[0].rstrip("/")}
    key = getattr(service.credential, "account_key", None)
    if key:
        settings["account_key"] = key
    elif fs.sas_token:
        settings["sas_key"] = fs.sas_token.lstrip("?")
    else:
        raise StoreUnusable(
            f"{store.url}: with obstore, Azure needs an account key or a SAS token; leave EVERSTEP_STORAGE unset for "
            "other credentials"
        )
    return Client(
        container, prefix=prefix.rstrip("/"), client_options=_options(service.url), retry_config=_ONCE, **settings
    )


def _options(endpoint: str) -> Any:
    return {**_CLIENT, "allow_http": endpoint.startswith("http://")}


def _soon() -> datetime:
    return datetime.now(UTC) + _KEEP
