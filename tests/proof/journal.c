/* A preloaded library that journals what a process does to the files below one directory.
 *
 *     KIVI_JOURNAL_ROOT   the directory
 *     KIVI_JOURNAL        the journal: records of a fixed header and up to two byte strings (tests/proof/powerloss.py)
 *     KIVI_FAIL           "NUMBER ERRNO LASTS": the call of that number fails, and all after it too if LASTS is 1
 *     JOURNAL_FAIL_SYNC   a file outside the directory: while it is there, fdatasync fails (EIO) of all files whose path
 *                         has in it what this one holds
 *
 * Calls that change a file or a directory run under one mutex together with their record, so the journal's order is the
 * order in which they took effect. A sync has two records: it covers what was recorded before its first one, and only if
 * the second is there. Files are known by their inode, since a name may change while a file is open.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, WRITE, TRUNCATE, ALLOCATE, SYNC_BEGIN, SYNC_END, RENAME, UNLINK, MKDIR, RMDIR, LINK };

struct record {
    uint32_t op, reserved;
    uint64_t inode, offset, number, first, second; /* first, second: lengths of the strings that follow */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static const char *fail_sync;
static size_t root_length;
static int journal = -1;
static uint64_t numbers, calls, fail_at;
static int fail_errno, fail_lasts;

__attribute__((constructor)) static void start(void) {
    const char *directory = getenv("KIVI_JOURNAL_ROOT"), *path = getenv("KIVI_JOURNAL");
    if (directory == NULL || path == NULL || realpath(directory, root) == NULL)
        return;
    root_length = strlen(root);
    fail_sync = getenv("JOURNAL_FAIL_SYNC");
    const char *fail = getenv("KIVI_FAIL");
    if (fail != NULL && sscanf(fail, "%lu %d %d", &fail_at, &fail_errno, &fail_lasts) != 3)
        abort();
    journal = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
}

static void lock(void) { pthread_mutex_lock(&mutex); }
static void unlock(void) { int kept = errno; pthread_mutex_unlock(&mutex); errno = kept; }

/* Whether this call is to fail; under the mutex. */
static int fails(void) {
    calls++;
    if (!fail_at || calls < fail_at || (calls > fail_at && !fail_lasts))
        return 0;
    errno = fail_errno;
    return 1;
}

static int below_root(const char *path) {
    return journal >= 0 && strncmp(path, root, root_length) == 0 && (path[root_length] == '/' || path[root_length] == 0);
}

/* The absolute path of ``path``, whose last part need not exist; 0 if it is not below the root. */
static int resolved(int directory, const char *path, char *out) {
    char parent[PATH_MAX], real[PATH_MAX];
    if (journal < 0 || path == NULL)
        return 0;
    if (path[0] != '/' && directory != AT_FDCWD) {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        ssize_t n = readlink(link, parent, sizeof parent - 1);
        if (n < 0)
            return 0;
        parent[n] = 0;
        if ((size_t)n + 1 + strlen(path) >= PATH_MAX)
            return 0;
        strcat(strcat(parent, "/"), path);
    } else {
        if (strlen(path) >= PATH_MAX)
            return 0;
        strcpy(parent, path);
    }
    size_t length = strlen(parent);
    while (length > 1 && parent[length - 1] == '/')
        parent[--length] = 0;
    char *slash = strrchr(parent, '/');
    const char *name = slash ? slash + 1 : parent, *head = slash ? (slash == parent ? "/" : parent) : ".";
    char last[NAME_MAX + 1];
    if (strlen(name) > NAME_MAX)
        return 0;
    strcpy(last, name);
    if (slash && slash != parent)
        *slash = 0;
    if (realpath(head, real) == NULL || strlen(real) + strlen(last) + 2 > PATH_MAX)
        return 0;
    strcat(strcat(strcpy(out, strcmp(real, "/") ? real : ""), "/"), last);
    return below_root(out);
}

static uint64_t inode_of(const char *path) {
    struct stat st;
    return lstat(path, &st) == 0 ? st.st_ino : 0;
}

/* The inode of an open file below the root, or 0. */
static uint64_t watched(int fd) {
    char link[64], path[PATH_MAX];
    struct stat st;
    if (journal < 0 || fd == journal)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n <= 0)
        return 0;
    path[n] = 0;
    if (!below_root(path) || fstat(fd, &st) != 0)
        return 0;
    return st.st_ino;
}

static void put(const void *data, size_t length) {
    while (length) {
        ssize_t n = syscall(SYS_write, journal, data, length);
        if (n <= 0)
            abort(); /* a journal with a hole proves nothing */
        data = (const char *)data + n;
        length -= n;
    }
}

static void note(uint32_t op, uint64_t inode, uint64_t offset, uint64_t number, const void *a, size_t m, const void *b,
                 size_t n) {
    int kept = errno;
    struct record r = {op, 0, inode, offset, number, m, n};
    put(&r, sizeof r);
    put(a, m);
    put(b, n);
    errno = kept;
}

/* -- opening ------------------------------------------------------------------------------------------------ */

static int opened(int directory, const char *path, int flags, mode_t mode) {
    char absolute[PATH_MAX];
    if (!(flags & (O_CREAT | O_TRUNC)) || !resolved(directory, path, absolute))
        return syscall(SYS_openat, directory, path, flags, mode);
    lock();
    int existed = inode_of(absolute) != 0;
    int fd = fails() ? -1 : syscall(SYS_openat, directory, path, flags, mode);
    if (fd >= 0) {
        uint64_t inode = inode_of(absolute);
        if (!existed)
            note(CREATE, inode, 0, 0, absolute, strlen(absolute), NULL, 0);
        else if (flags & O_TRUNC)
            note(TRUNCATE, inode, 0, 0, NULL, 0, NULL, 0);
    }
    unlock();
    return fd;
}

#define MODE(flags)                                                                                                    \
    mode_t mode = 0;                                                                                                   \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                                               \
        va_list list;                                                                                                  \
        va_start(list, flags);                                                                                         \
        mode = va_arg(list, int);                                                                                      \
        va_end(list);                                                                                                  \
    }

int open(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags) return opened(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags) return opened(at, path, flags, mode); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* -- writing ------------------------------------------------------------------------------------------------ */

static ssize_t written(int fd, const struct iovec *parts, int count, off_t at, ssize_t (*call)(int, const struct iovec *, int, off_t)) {
    uint64_t inode = watched(fd);
    if (!inode)
        return call(fd, parts, count, at);
    lock();
    struct stat st;
    off_t offset = at;
    if (at < 0) {
        offset = fcntl(fd, F_GETFL) & O_APPEND ? (fstat(fd, &st) == 0 ? st.st_size : 0) : lseek(fd, 0, SEEK_CUR);
    }
    ssize_t n = fails() ? -1 : call(fd, parts, count, at);
    if (n > 0) {
        char *data = malloc(n), *end = data;
        size_t left = n;
        for (int i = 0; i < count && left; i++) {
            size_t take = parts[i].iov_len < left ? parts[i].iov_len : left;
            memcpy(end, parts[i].iov_base, take);
            end += take;
            left -= take;
        }
        note(WRITE, inode, offset, 0, data, n, NULL, 0);
        free(data);
    }
    unlock();
    return n;
}

static ssize_t plain(int fd, const struct iovec *parts, int count, off_t at) {
    (void)at;
    return syscall(SYS_writev, fd, parts, count);
}
static ssize_t placed(int fd, const struct iovec *parts, int count, off_t at) {
    return syscall(SYS_pwritev, fd, parts, count, at, 0);
}

ssize_t write(int fd, const void *data, size_t n) {
    struct iovec part = {(void *)data, n};
    return written(fd, &part, 1, -1, plain);
}
ssize_t writev(int fd, const struct iovec *parts, int count) { return written(fd, parts, count, -1, plain); }
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) {
    struct iovec part = {(void *)data, n};
    return written(fd, &part, 1, at, placed);
}
ssize_t pwrite64(int fd, const void *data, size_t n, off_t at) { return pwrite(fd, data, n, at); }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) { return written(fd, parts, count, at, placed); }
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t at) { return written(fd, parts, count, at, placed); }
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t at, int flags) {
    (void)flags;
    return at < 0 ? written(fd, parts, count, -1, plain) : written(fd, parts, count, at, placed);
}
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off_t at, int flags) { return pwritev2(fd, parts, count, at, flags); }

int ftruncate(int fd, off_t size) {
    uint64_t inode = watched(fd);
    if (!inode)
        return syscall(SYS_ftruncate, fd, size);
    lock();
    int out = fails() ? -1 : syscall(SYS_ftruncate, fd, size);
    if (out == 0)
        note(TRUNCATE, inode, size, 0, NULL, 0, NULL, 0);
    unlock();
    return out;
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }

static int allocated(int fd, int mode, off_t at, off_t size) {
    uint64_t inode = watched(fd);
    if (!inode)
        return syscall(SYS_fallocate, fd, mode, at, size);
    lock();
    int out = fails() ? -1 : syscall(SYS_fallocate, fd, mode, at, size);
    if (out == 0 && !(mode & FALLOC_FL_KEEP_SIZE))
        note(ALLOCATE, inode, at + size, 0, NULL, 0, NULL, 0);
    unlock();
    return out;
}
int fallocate(int fd, int mode, off_t at, off_t size) { return allocated(fd, mode, at, size); }
int fallocate64(int fd, int mode, off_t at, off_t size) { return allocated(fd, mode, at, size); }
int posix_fallocate(int fd, off_t at, off_t size) { return allocated(fd, 0, at, size) == 0 ? 0 : errno; }
int posix_fallocate64(int fd, off_t at, off_t size) { return posix_fallocate(fd, at, size); }

/* -- syncing ------------------------------------------------------------------------------------------------ */

static int sync_fails(int fd) {
    char part[256], link[64], path[PATH_MAX];
    int file = fail_sync == NULL ? -1 : (int)syscall(SYS_openat, AT_FDCWD, fail_sync, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return 0;
    ssize_t m = syscall(SYS_read, file, part, sizeof part - 1);
    syscall(SYS_close, file);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (m < 0 || n < 0)
        return 0;
    part[m] = path[n] = 0;
    return strstr(path, part) != NULL;
}

static int synced(int fd, long call) {
    uint64_t inode = watched(fd), number = 0;
    int failed = 0;
    if (inode) {
        lock();
        number = ++numbers;
        note(SYNC_BEGIN, inode, 0, number, NULL, 0, NULL, 0);
        failed = fails();
        unlock();
        if (!failed && call == SYS_fdatasync && sync_fails(fd)) {
            failed = 1;
            errno = EIO;
        }
    }
    int out = failed ? -1 : syscall(call, fd);
    if (inode && out == 0) {
        lock();
        note(SYNC_END, inode, 0, number, NULL, 0, NULL, 0);
        unlock();
    }
    return out;
}
int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

/* -- names -------------------------------------------------------------------------------------------------- */

static int renamed(int from, const char *old, int to, const char *new, unsigned flags) {
    char a[PATH_MAX], b[PATH_MAX];
    int known = resolved(from, old, a) && resolved(to, new, b);
    if (!known)
        return syscall(SYS_renameat2, from, old, to, new, flags);
    lock();
    uint64_t inode = inode_of(a);
    int out = fails() ? -1 : syscall(SYS_renameat2, from, old, to, new, flags);
    if (out == 0)
        note(RENAME, inode, 0, 0, a, strlen(a), b, strlen(b));
    unlock();
    return out;
}
int rename(const char *old, const char *new) { return renamed(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return renamed(from, old, to, new, 0); }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) { return renamed(from, old, to, new, flags); }

static int removed(int at, const char *path, int flags) {
    char absolute[PATH_MAX];
    if (!resolved(at, path, absolute))
        return syscall(SYS_unlinkat, at, path, flags);
    lock();
    uint64_t inode = inode_of(absolute);
    int out = fails() ? -1 : syscall(SYS_unlinkat, at, path, flags);
    if (out == 0)
        note(flags & AT_REMOVEDIR ? RMDIR : UNLINK, inode, 0, 0, absolute, strlen(absolute), NULL, 0);
    unlock();
    return out;
}
int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int unlinkat(int at, const char *path, int flags) { return removed(at, path, flags); }
int rmdir(const char *path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) {
    struct stat st;
    return removed(AT_FDCWD, path, lstat(path, &st) == 0 && S_ISDIR(st.st_mode) ? AT_REMOVEDIR : 0);
}

static int made(int at, const char *path, mode_t mode) {
    char absolute[PATH_MAX];
    if (!resolved(at, path, absolute))
        return syscall(SYS_mkdirat, at, path, mode);
    lock();
    int out = fails() ? -1 : syscall(SYS_mkdirat, at, path, mode);
    if (out == 0)
        note(MKDIR, inode_of(absolute), 0, 0, absolute, strlen(absolute), NULL, 0);
    unlock();
    return out;
}
int mkdir(const char *path, mode_t mode) { return made(AT_FDCWD, path, mode); }
int mkdirat(int at, const char *path, mode_t mode) { return made(at, path, mode); }

static int linked(int from, const char *old, int to, const char *new, int flags) {
    char a[PATH_MAX], b[PATH_MAX];
    if (!resolved(from, old, a) || !resolved(to, new, b))
        return syscall(SYS_linkat, from, old, to, new, flags);
    lock();
    int out = fails() ? -1 : syscall(SYS_linkat, from, old, to, new, flags);
    if (out == 0)
        note(LINK, inode_of(b), 0, 0, a, strlen(a), b, strlen(b));
    unlock();
    return out;
}
int link(const char *old, const char *new) { return linked(AT_FDCWD, old, AT_FDCWD, new, 0); }
int linkat(int from, const char *old, int to, const char *new, int flags) { return linked(from, old, to, new, flags); }
