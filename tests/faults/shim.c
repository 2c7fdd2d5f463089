/* Faults of files and threads, injected between a process and its C library: LD_PRELOAD this.
 *
 * What happens is said by environment variables, which the process may change as it goes. Faults meet only files whose
 * path contains FAULT_PATH, and, with FAULT_WAY=direct or FAULT_WAY=buffered, only descriptors of that kind.
 *
 *   FAULT_OPEN=errno     opening fails
 *   FAULT_STAT=errno     asking for attributes (statx) fails
 *   FAULT_READ=errno     reading fails; with FAULT_AT=byte, only where that byte's page is, and reads stop short of it
 *   FAULT_EVERY=n        every n-th of these reads only
 *   FAULT_EMPTY=1        reads give nothing, as at the end of the file; FAULT_AT as above
 *   FAULT_SHORT=bytes    reads give at most so many bytes
 *   FAULT_HANG=ms        reads take so long; FAULT_AT as above
 *   FAULT_HOLD=file      reads wait as long as the file is there, and make one called file.held; FAULT_AT as above
 *   FAULT_THREADS=n      only n more threads can be started, whatever FAULT_PATH says
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096 };

static long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

static bool concerns(const char *path, bool direct) {
    const char *marker = getenv("FAULT_PATH"), *way = getenv("FAULT_WAY");
    if (!marker || !*marker || !path || !strstr(path, marker)) return false;
    return !way || !*way || strcmp(way, direct ? "direct" : "buffered") == 0;
}

static bool concerns_descriptor(int fd) {
    char link[64], path[PATH_MAX + 1];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t len = readlink(link, path, PATH_MAX);
    if (len < 0) return false;
    path[len] = 0;
    return concerns(path, fcntl(fd, F_GETFL) & O_DIRECT);
}

static void sleep_for(long ms) {
    struct timespec left = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
}

static void wait_while_there(const char *file) {
    char held[PATH_MAX + 1];
    snprintf(held, sizeof held, "%s.held", file);
    FILE *made = fopen(held, "w");
    if (made) fclose(made);
    while (access(file, F_OK) == 0) sleep_for(1);
}

typedef ssize_t read_function(int, void *, size_t, off64_t);

static ssize_t read_faultily(read_function *real, int fd, void *into, size_t count, off64_t offset) {
    static atomic_long calls;
    if (!getenv("FAULT_PATH") || !concerns_descriptor(fd)) return real(fd, into, count, offset);
    long number = setting("FAULT_READ", 0), hang = setting("FAULT_HANG", 0), at = setting("FAULT_AT", -1);
    bool empty = setting("FAULT_EMPTY", 0), here = true;
    if (at >= 0) {
        off64_t bad = at / PAGE * PAGE;
        here = offset < bad + PAGE && offset + (off64_t)count > bad;
        if (here && offset < bad) {
            // Up to the bad page all is well.
            count = bad - offset;
            here = false;
        }
    }
    const char *hold = getenv("FAULT_HOLD");
    if (here && hang) sleep_for(hang);
    if (here && hold && *hold) wait_while_there(hold);
    if (here && empty) return 0;
    if (here && number && atomic_fetch_add(&calls, 1) % setting("FAULT_EVERY", 1) == 0) {
        errno = (int)number;
        return -1;
    }
    // The kernel may write more than it says it has read, so this does no less.
    ssize_t got = real(fd, into, count, offset);
    long most = setting("FAULT_SHORT", 0);
    return most && got > most ? most : got;
}

ssize_t pread64(int fd, void *into, size_t count, off64_t offset) {
    return read_faultily((read_function *)dlsym(RTLD_NEXT, "pread64"), fd, into, count, offset);
}

ssize_t pread(int fd, void *into, size_t count, off_t offset) {
    return read_faultily((read_function *)dlsym(RTLD_NEXT, "pread"), fd, into, count, offset);
}

static bool opening_fails(const char *path, int flags) {
    long number = setting("FAULT_OPEN", 0);
    if (!number || !concerns(path, flags & O_DIRECT)) return false;
    errno = (int)number;
    return true;
}

typedef int open_function(const char *, int, ...);

#define DEFINE_OPEN(name)                                           \
    int name(const char *path, int flags, ...) {                    \
        va_list more;                                               \
        va_start(more, flags);                                      \
        mode_t mode = va_arg(more, mode_t);                         \
        va_end(more);                                               \
        if (opening_fails(path, flags)) return -1;                  \
        return ((open_function *)dlsym(RTLD_NEXT, #name))(path, flags, mode); \
    }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)

typedef int statx_function(int, const char *, int, unsigned, struct statx *);

int statx(int fd, const char *path, int flags, unsigned mask, struct statx *answer) {
    long number = setting("FAULT_STAT", 0);
    bool by_descriptor = path && !*path && (flags & AT_EMPTY_PATH);
    if (number && (by_descriptor ? concerns_descriptor(fd) : concerns(path, false))) {
        errno = (int)number;
        return -1;
    }
    return ((statx_function *)dlsym(RTLD_NEXT, "statx"))(fd, path, flags, mask, answer);
}

typedef int thread_function(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*body)(void *), void *with) {
    static atomic_long started;
    long most = setting("FAULT_THREADS", -1);
    if (most < 0) {
        atomic_store(&started, 0);
    } else if (atomic_fetch_add(&started, 1) >= most) {
        return EAGAIN;
    }
    return ((thread_function *)dlsym(RTLD_NEXT, "pthread_create"))(thread, how, body, with);
}
