/* A disk that fails on demand, for LD_PRELOAD: see failing_disk.py, which owns the control file and the record. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PATH_BYTES = 1024 };

/* The layout of failing_disk.py's _CONTROL. */
struct control {
    int64_t is_on;     /* whether calls are counted */
    int64_t fails_at;  /* the first call that fails, from 1; 0: none */
    int64_t calls;     /* how many may fail: 1, or all that follow */
    int64_t error;     /* errno of a failed call; 0: calls do not fail */
    int64_t is_torn;   /* whether a failed write writes its first half */
    int64_t only;      /* bits of the kinds of calls that are counted */
    int64_t pause_us;  /* added to each sync */
    int64_t seen;      /* calls counted so far */
    char folder[PATH_BYTES]; /* files in it are concerned */
    char record[PATH_BYTES]; /* where successful calls are recorded; empty: they are not */
};

enum kind { WRITE = 1, SYNC = 2, MAKE = 4, MOVE = 8, REMOVE = 16, CUT = 32 };

static struct control *control;
static int record_file = -1;
static char record_path[PATH_BYTES];

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("FAILING_DISK_CONTROL");
    int file = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) control = mapped;
}

static int path_of(int file, char *path) {
    char link[64] = "/proc/self/fd/";
    char digits[16];
    int count = 0, end = 14;
    do digits[count++] = (char)('0' + file % 10); while (file /= 10);
    while (count) link[end++] = digits[--count];
    link[end] = 0;
    ssize_t found = readlink(link, path, PATH_BYTES - 1);
    if (found <= 0) return 0;
    path[found] = 0;
    return 1;
}

static int concerns(const char *path) {
    size_t length = strlen(control->folder);
    return length && !strncmp(path, control->folder, length);
}

/* Whether this call fails; it is counted. */
static int fails(enum kind kind) {
    if (!(control->only & kind)) return 0;
    int64_t number = __atomic_add_fetch(&control->seen, 1, __ATOMIC_SEQ_CST);
    int64_t first = control->fails_at;
    return control->error && first && number >= first && number - first < control->calls;
}

static int watched(void) { return control && control->is_on; }

/* A record: kind, offset, length of two paths and of the content as 5 int64, then these. */
static void note(enum kind kind, const char *path, const char *other, int64_t offset, const void *content, size_t size) {
    if (!control->record[0]) return;
    if (strcmp(record_path, control->record)) {
        if (record_file >= 0) close(record_file);
        strcpy(record_path, control->record);
        record_file = (int)syscall(SYS_openat, AT_FDCWD, control->record, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    }
    size_t first = strlen(path), second = other ? strlen(other) : 0, total = 40 + first + second + size;
    int64_t head[5] = {kind, offset, (int64_t)first, (int64_t)second, (int64_t)size};
    char *entry = malloc(total);
    memcpy(entry, head, 40);
    memcpy(entry + 40, path, first);
    if (second) memcpy(entry + 40 + first, other, second);
    if (size) memcpy(entry + 40 + first + second, content, size);
    if (syscall(SYS_write, record_file, entry, total) != (long)total) abort();
    free(entry);
}

static ssize_t put(int file, const void *content, size_t size, int64_t offset) {
    char path[PATH_BYTES];
    int has_offset = offset >= 0;
    if (!watched() || file == record_file || !path_of(file, path) || !concerns(path))
        return has_offset ? syscall(SYS_pwrite64, file, content, size, offset) : syscall(SYS_write, file, content, size);
    int saved = errno, is_failed = fails(WRITE);
    if (is_failed && !(control->is_torn && size > 1)) {
        errno = (int)control->error;
        return -1;
    }
    size_t wanted = is_failed ? size / 2 : size;
    int64_t at = offset;
    if (!has_offset) {
        int is_append = (int)syscall(SYS_fcntl, file, F_GETFL) & O_APPEND;
        at = syscall(SYS_lseek, file, 0, is_append ? SEEK_END : SEEK_CUR);
    }
    ssize_t written = has_offset ? syscall(SYS_pwrite64, file, content, wanted, at) : syscall(SYS_write, file, content, wanted);
    if (written > 0) note(WRITE, path, NULL, at, content, (size_t)written);
    errno = is_failed ? (int)control->error : written < 0 ? errno : saved;
    return is_failed ? -1 : written;
}

ssize_t write(int file, const void *content, size_t size) { return put(file, content, size, -1); }
ssize_t pwrite(int file, const void *content, size_t size, off_t offset) { return put(file, content, size, offset); }
ssize_t pwrite64(int file, const void *content, size_t size, off64_t offset) { return put(file, content, size, offset); }

static int sync_file(long call, int file) {
    char path[PATH_BYTES];
    if (!watched() || !path_of(file, path) || !concerns(path)) return (int)syscall(call, file);
    if (control->pause_us) usleep((useconds_t)control->pause_us);
    if (fails(SYNC)) {
        errno = (int)control->error;
        return -1;
    }
    int done = (int)syscall(call, file);
    if (!done) note(SYNC, path, NULL, 0, NULL, 0);
    return done;
}

int fsync(int file) { return sync_file(SYS_fsync, file); }
int fdatasync(int file) { return sync_file(SYS_fdatasync, file); }

static int cut(int file, int64_t size) {
    char path[PATH_BYTES];
    int is_concerned = watched() && path_of(file, path) && concerns(path);
    if (is_concerned && fails(CUT)) {
        errno = (int)control->error;
        return -1;
    }
    int done = (int)syscall(SYS_ftruncate, file, size);
    if (!done && is_concerned) note(CUT, path, NULL, size, NULL, 0);
    return done;
}

int ftruncate(int file, off_t size) { return cut(file, size); }
int ftruncate64(int file, off64_t size) { return cut(file, size); }

static int open_file(int folder, const char *path, int flags, mode_t mode) {
    int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT);
    int is_concerned = writes && watched() && concerns(path);
    if (is_concerned && fails(MAKE)) {
        errno = (int)control->error;
        return -1;
    }
    int opened = (int)syscall(SYS_openat, folder, path, flags, mode);
    if (opened >= 0 && is_concerned) {
        note(MAKE, path, NULL, 0, NULL, 0);
        if (flags & O_TRUNC) note(CUT, path, NULL, 0, NULL, 0);
    }
    return opened;
}

#define MODE(last) mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, last); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) { MODE(flags) return open_file(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return open_file(AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE(flags) return open_file(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE(flags) return open_file(folder, path, flags, mode); }

static int change(enum kind kind, long call, const char *path, const char *other) {
    int is_concerned = watched() && concerns(path);
    if (is_concerned && fails(kind)) {
        errno = (int)control->error;
        return -1;
    }
    int done = (int)(other ? syscall(call, path, other) : syscall(call, path));
    if (!done && is_concerned) note(kind, path, other, 0, NULL, 0);
    return done;
}

int rename(const char *path, const char *other) { return change(MOVE, SYS_rename, path, other); }
int unlink(const char *path) { return change(REMOVE, SYS_unlink, path, NULL); }
