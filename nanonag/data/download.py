"""Text that is downloaded: Hugging Face data sets, or one file."""

import hashlib
import http.client
import urllib.request

from nanonag.cli import UserError


def load_hub(name, revision, num_proc=1):
    """Download a Hugging Face data set.

    Returns its splits (name -> rows, for read_rows) and the commit they are from. Raises UserError
    if the package datasets is missing or the data set cannot be downloaded.
    """
    try:
        import datasets
        import huggingface_hub

        commit = huggingface_hub.HfApi().dataset_info(name, revision=revision).sha
        return datasets.load_dataset(name, revision=commit, num_proc=num_proc), commit
    except ImportError as error:
        raise UserError(
            f'downloading {name} needs the package datasets ({error}): pip install datasets'
        ) from None
    # many libraries lie below: no network, no such revision, a full disk, ...
    except Exception as error:
        raise UserError(
            f'{name} at {revision!r} cannot be downloaded from Hugging Face '
            f'({type(error).__name__}: {error}); '
            'try again later, try another --revision, or give its files with --input'
        ) from error


def read_rows(rows):
    """Yield the documents of one split of a Hugging Face data set: its column 'text'."""
    for batch in rows.iter(batch_size=1000):
        for text in batch['text']:
            yield text, True


def fetch(url, sha256):
    """The bytes at `url`.

    Raises UserError if they cannot be downloaded or do not have this SHA-256 digest.
    """
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            data = response.read(2**30)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UserError(
            f'{url}: cannot be downloaded ({error}); '
            'download it by other means and give the file with --input'
        ) from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(
            f'{url}: not the file this script was written for (SHA-256 differs); '
            'give a file of your own with --input'
        )
    return data
