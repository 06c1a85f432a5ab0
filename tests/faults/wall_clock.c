/* The wall clock of a process and its children, moved by the seconds in the file CLOCK_OFFSET_FILE.

   Loaded by LD_PRELOAD. As with a clock that is set while processes run, the monotonic clock stays as it is. A deadline
   of the wall clock is moved back before it reaches the kernel, whose clock has not moved. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *offset;

__attribute__((constructor)) static void open_offset(void) {
    const char *path = getenv("CLOCK_OFFSET_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *memory = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (memory != MAP_FAILED) offset = memory;
    close(file);
}

static long moved(void) { return offset ? *offset : 0; }

static struct timespec for_kernel(const struct timespec *deadline) {
    struct timespec result = *deadline;
    if (result.tv_sec > 1000000000) result.tv_sec -= moved(); /* less is a deadline of the monotonic clock */
    return result;
}

#define NEXT(name) static __typeof__(name) *next; if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

int clock_gettime(clockid_t clock, struct timespec *now) {
    NEXT(clock_gettime);
    int error = next(clock, now);
    if (!error && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += moved();
    return error;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    now->tv_sec = time.tv_sec, now->tv_usec = time.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *deadline) {
    NEXT(pthread_cond_timedwait);
    struct timespec kernel = for_kernel(deadline);
    return next(condition, mutex, &kernel);
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *deadline) {
    NEXT(pthread_mutex_timedlock);
    struct timespec kernel = for_kernel(deadline);
    return next(mutex, &kernel);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
    NEXT(sem_timedwait);
    struct timespec kernel = for_kernel(deadline);
    return next(semaphore, &kernel);
}
