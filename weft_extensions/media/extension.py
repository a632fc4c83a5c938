"""Images, transcriptions and speech over HTTP and on the command line."""

from weft.extension import ApiHook, CommandHook, Extension, TaskApiHook

_TASKS = "weft_extensions.media.media_tasks"

EXTENSION = Extension(
    name="media",
    summary="Images, transcriptions and speech: OpenAI's endpoints, tasks and commands.",
    docs="docs/media.md",
    apis=(
        ApiHook(
            place="weft_extensions.media.media_endpoints:API",
            paths=(
                "/v1/images/generations",
                "/v1/images/edits",
                "/v1/images/variations",
                "/v1/audio/transcriptions",
                "/v1/audio/translations",
                "/v1/audio/speech",
                "/v1/audio/voices",
            ),
            is_of_runners=True,
        ),
    ),
    task_apis=(
        TaskApiHook(endpoint="/v1/images/generations", kind="images", place=f"{_TASKS}:IMAGES"),
        TaskApiHook(endpoint="/v1/images/edits", kind="image_edits", place=f"{_TASKS}:IMAGE_EDITS"),
        TaskApiHook(endpoint="/v1/audio/transcriptions", kind="transcriptions", place=f"{_TASKS}:TRANSCRIPTIONS"),
        TaskApiHook(endpoint="/v1/audio/translations", kind="translations", place=f"{_TASKS}:TRANSLATIONS"),
        TaskApiHook(endpoint="/v1/audio/speech", kind="speech", place=f"{_TASKS}:SPEECH"),
    ),
    commands=(
        CommandHook(
            words="media",
            summary="Make images, transcribe recordings and speak texts.",
            example="weft media image 'a lighthouse at night' -o lighthouse.png",
        ),
        CommandHook(
            words="media image",
            place="weft_extensions.media.image_command:image",
            summary=(
                "Make images from a description, or from images, as files. Progress goes to stderr; Ctrl-C cancels."
            ),
        ),
        CommandHook(
            words="media transcribe",
            place="weft_extensions.media.transcribe_command:transcribe",
            summary="Transcribe a recording. Text and captions are streamed, progress goes to stderr; Ctrl-C cancels.",
        ),
        CommandHook(
            words="media speak",
            place="weft_extensions.media.speak_command:speak",
            summary=(
                "Speak a text: the recording goes to a file, or to stdout in a pipe. Nothing is played; Ctrl-C cancels."
            ),
        ),
    ),
)
